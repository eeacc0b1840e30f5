"""Inspects stored rows: validates them, collects statistics, plays and draws single ones, and filters them.

`scan` reads the Parquet files a few rows at a time and goes on after damaged parts; `measures` measures recordings and
`train.data.prepare.codecs` checks codes. The commands `data validate`, `stats`, `listen` and `filter` build on these. None
holds more than a row group's pages and a few numbers for each row.
"""
