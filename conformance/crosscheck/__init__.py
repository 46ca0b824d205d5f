"""Second, differently written oracles, used only in tests."""
