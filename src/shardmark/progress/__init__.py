"""What a person sees while a run works: lines, or a display at the foot of the terminal."""
