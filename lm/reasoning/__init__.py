"""The paper's other systems: encoders that write, then read, a memory shared by all layers, and the tasks they reason on."""
