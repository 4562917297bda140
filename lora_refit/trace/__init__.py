"""Learning data movement from tagged values: tags -> planes -> movement."""
