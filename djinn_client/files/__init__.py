"""The files of a checkpoint folder, opened with the rights of the process that names it."""
