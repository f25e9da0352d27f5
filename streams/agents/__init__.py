"""The agents of the worker: each reads one topic, keeps pure cores in memory and gives out what they say."""
