"""Accuracy lanes against a live server: run, compare, receipts and reports."""
