// Ctrl-C and similar signals. SIGINT, SIGTERM and, unless it is ignored (nohup), SIGHUP end the program with exit code
// 130 and remove the temporary file of an AtomicFile. Most commands end at once. A command that calls check_stop() ends
// in order, with its results so far; a second signal ends it at once. Signals that a failed write would send become the
// error of that write. SIGBUS in the mapped input file becomes a sentence.
#pragma once

#include <cstddef>
#include <string>

namespace eaves::cli {

constexpr int kStoppedExitCode = 130;  // 128 + SIGINT, as in a shell; the same for all of these signals

/// The exception of check_stop(). It is no std::exception, so that no handler takes it for a row's failure.
struct Stopped {
  std::string message;
};

/// Called at the start of the program.
void handle_stop_signals();

/// From here on check_stop() handles the first signal.
void defer_stop();

/// True if a signal has come.
bool is_stop_wanted();

/// Throws Stopped if a signal has come.
void check_stop();

/// The file to remove if a signal ends the program at once; nullptr: none. The characters are not copied.
void remove_when_stopped(const char* path);

/// The memory of the mapped input file; nullptr: none. If another process cuts the file short, reading the missing
/// bytes ends the program with a sentence.
void expect_input_at(const void* data, std::size_t bytes);

/// Throws std::system_error if standard output cannot be written; its code is std::errc::broken_pipe if the reader of a
/// pipe has left.
void flush_output();

}  // namespace eaves::cli
