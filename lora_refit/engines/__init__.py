"""Engines: where refitted adapters live."""
