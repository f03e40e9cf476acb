"""What a shell script would run, found without running anything and within a budget."""

from shardwise.shell._interpreter import Shell, commands_of
from shardwise.shell._lexer import Budget, whole_of
from shardwise.shell._words import flat, left_open
