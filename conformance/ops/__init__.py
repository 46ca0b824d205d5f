"""Op specs, one file per op family; every module here is discovered by name."""
