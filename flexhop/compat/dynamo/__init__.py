"""Rules by which Dynamo traces our operators, and its treatment of numbers and sizes."""
