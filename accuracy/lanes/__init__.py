"""Lane files; every YAML file here is a lane."""
