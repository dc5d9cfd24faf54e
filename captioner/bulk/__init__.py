"""Jobs too large for one run: inputs divided into parts, and parts written exactly once.

`captioner.bulk.inputs` divides photos, Parquet files and WebDataset tars into numbered parts and
reads them; `captioner.bulk.job` keeps the folder that the parts are written to; `captioner.ray`
captions parts on a Ray cluster.
"""
