"""Programs that run an op over real process groups, one process a rank."""
