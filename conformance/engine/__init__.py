"""What holds any implementation of any op against its oracle; it knows no op by name."""
