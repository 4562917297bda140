"""Merged mode: each trainer rank merges the adapter into its own base shards, bucket by bucket.

pieces (who computes which rectangle) -> layout (buckets) -> merge_plan, merger (the launches) ->
delivery (the bucket ring). Engines read the ring in engines/vllm.
"""
