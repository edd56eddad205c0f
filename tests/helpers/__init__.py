"""What several test folders share: worlds of processes, a zoo of models, two trainers to compare."""
