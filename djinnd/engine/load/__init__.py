"""Plans and carries out loads of models while other models run."""
