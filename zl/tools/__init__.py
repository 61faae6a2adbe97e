"""What the socket tools of the command line are made of: the dissector and the load generator. Owns no state."""
