"""Small copies between host and device in every step, without a synchronisation."""
