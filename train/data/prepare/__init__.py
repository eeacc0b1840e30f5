"""From anybody's data set to documented rows in Parquet shards: read, spoken, encoded, stored.

`engine.prepare` is the whole. A preparation works in a folder beside its output, `OUT.preparing`, which becomes OUT by one
rename once everything is there, so that an OUT is always whole. Items of the source are cut into blocks of a fixed size
(`blocks`), made in any number of processes (`pool`), and taken in their order (`engine`): what is stored depends on the source
and the settings alone. Every finished shard leaves a note of the items it covers (`shards`), where an interrupted preparation
goes on; `lock` keeps two of them apart, `settings` refuses to go on with other settings.
"""
