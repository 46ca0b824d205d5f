"""Single faults put into an implementation's source by rule, and what the suite sees of them."""
