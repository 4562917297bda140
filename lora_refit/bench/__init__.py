"""Benchmarks. They print ratios measured in one run: absolute times depend on the machine."""
