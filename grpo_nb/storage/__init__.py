"""How bytes are kept and read: files that survive a kill, JSON lines with their index, bounded schemas, content digests."""
