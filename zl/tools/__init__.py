"""What commands are made of: the dissector, the load generator, netcat, the parts of doctor. Owns no state."""
