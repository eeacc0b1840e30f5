"""Looking at stored rows: what is wrong with them, what they are like, one of them at a time, and a choice of them.

`scan` reads the Parquet files a few rows at a time and goes on behind what is damaged; `measures` says what a recording is like
and `codecs` what codes must be. On these stand the commands `validate`, `stats`, `listen` and `filter`, each a module with
`main(argv)`. None holds more than a row group's pages and a few numbers for each row.
"""
