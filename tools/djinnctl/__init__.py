"""djinnctl: looks after a running djinnd from the shell, and examines the machine that it is to run on."""
