"""Sessions that last: an immutable snapshot at a segment boundary + the token ids since, kept by a store."""
