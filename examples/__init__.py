"""Programs that use graphbuf the way a reader of the README would."""
