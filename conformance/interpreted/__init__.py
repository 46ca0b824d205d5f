"""What the Triton interpreter needs: exact casts, lane-by-lane memory checks, and speed."""
