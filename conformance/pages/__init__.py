"""Pages for people: one HTML file for a run of conformance, of benchmarks, or a history."""
