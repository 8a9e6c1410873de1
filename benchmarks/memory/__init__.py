"""What the memory buys: on tasks that need it, and on real text, against a plain window and against peers."""
