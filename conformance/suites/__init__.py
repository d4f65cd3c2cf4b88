"""What pytest runs: one file an operation, each test a case in and a verdict out."""
