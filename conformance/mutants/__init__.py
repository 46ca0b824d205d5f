"""Wrong implementations with one fault each, and correct variants."""
