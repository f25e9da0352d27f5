"""The records of every kvcensus topic: Avro schemas, their msgspec types and the codec. Imports nothing of ours."""
