"""How bytes are kept and read: files that survive a kill, JSON lines and their index, schemas, content digests."""
