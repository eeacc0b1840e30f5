"""Prepares data sets: converts any readable data set to documented rows in Parquet shards, with speech and codes added.

`prepare.prepare` runs it all. A preparation works in a folder beside its output, `OUT.preparing`, which becomes OUT by one
rename once it is complete, so that an OUT is always whole. Items of the source are processed in blocks of a fixed size
(`worker`), in any number of processes of this machine or a cluster (`train.data.executor`), and stored in their order
(`prepare`): the result depends on the source and the settings alone. Every finished shard has a note of the items it covers
(`shards`), after which an interrupted preparation goes on; a lock on the folder excludes a second process, and `settings`
refuses to go on with other settings.
"""
