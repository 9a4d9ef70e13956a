"""Plans and carries out loads of models while others step."""
