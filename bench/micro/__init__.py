"""Measurements of single parts, without a socket."""
