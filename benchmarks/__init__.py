"""What is measured, and against what."""
