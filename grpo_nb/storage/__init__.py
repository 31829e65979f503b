"""Storage of bytes: files that survive a kill, JSON lines and their index, schemas, content digests."""
