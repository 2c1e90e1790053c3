"""Tables in other formats than Parquet: each is written once as Parquet files, which are read."""
