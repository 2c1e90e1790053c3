"""Sources of rows that grow while they are read: Kafka topics and folders that are written to."""
