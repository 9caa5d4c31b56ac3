// Ctrl-C and its like. SIGINT, SIGTERM and, unless it is ignored (nohup), SIGHUP end the program with exit code 130,
// and the temporary file of an AtomicFile goes with it: at once or, in a command that asks check_stop() now and then,
// in order, with its results so far. There the second signal ends it at once. Signals that a failed write would send
// become the error of that write, and SIGBUS in the mapped input file becomes a sentence.
#pragma once

#include <cstddef>
#include <string>

namespace eaves::cli {

constexpr int kStoppedExitCode = 130;  // 128 + SIGINT, as a shell says it; the same for all of them

/// What check_stop() throws. No std::exception, so that no handler takes it for the failure of a row.
struct Stopped {
  std::string message;
};

/// At the program's begin.
void handle_stop_signals();

/// From here on the first signal is left to check_stop().
void defer_stop();

/// Whether there was one.
bool is_stop_wanted();

/// Throws Stopped if so.
void check_stop();

/// The file that a signal removes where it ends the program at once; nullptr: none. The characters are not copied.
void remove_when_stopped(const char* path);

/// Says where the input file is mapped. Reading bytes that another process has cut off it ends the program with a
/// sentence. nullptr: no file.
void expect_input_at(const void* data, std::size_t bytes);

/// Throws std::system_error if standard output cannot be written; its code is std::errc::broken_pipe if the reader of a
/// pipe has left.
void flush_output();

}  // namespace eaves::cli
