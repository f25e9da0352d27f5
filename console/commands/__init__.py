"""One module per command of the `kvcensus` command line, loaded only when it runs."""
