"""Jobs too large for one run: inputs divided into parts, and parts processed exactly once.

`captioner.bulk.inputs` divides photos, Parquet files and WebDataset tars into numbered parts and
reads them; `captioner.bulk.job` keeps the folder that the parts are written to;
`captioner.bulk.cluster` processes them on a Ray cluster. `captioner.bulk.captions` captions with
these, and `captioner.bulk.features` computes features.
"""
