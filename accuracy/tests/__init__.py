"""Tests of the accuracy lanes; none of them needs a model, torch or the network."""
