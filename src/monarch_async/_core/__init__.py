"""Sans-IO state machines: bytes in, events out; events in, instructions out. Time is an argument."""
