"""What a shell script would run, found without running anything and within a budget."""

from shardwise.shell._interpreter import Shell, commands_of, flat, left_open
from shardwise.shell._lexer import Budget, whole_of
