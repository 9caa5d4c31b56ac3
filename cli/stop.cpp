// The handler limits itself to lock-free atomics and a few system calls, as a signal handler must.
#include "cli/stop.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <string_view>
#include <system_error>

#include "cli/commands.h"

namespace eaves::cli {
namespace {

// timeout(1) sends its signal to the process and to its group. Two signals so close together count as one.
constexpr std::int64_t kOneSignalMs = 300;

std::atomic<bool> is_deferred{false};
std::atomic<std::int64_t> first_signal_ms{0};  // 0: none so far
std::atomic<const char*> temporary_path{nullptr};
std::atomic<std::uintptr_t> input_begin{0}, input_end{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free &&
              std::atomic<const char*>::is_always_lock_free && std::atomic<std::uintptr_t>::is_always_lock_free);

std::int64_t now_ms() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1000000 + 1;
}

[[noreturn]] void end_at_once(std::string_view message, int exit_code) {
  const char* path = temporary_path;
  if (path != nullptr) unlink(path);
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, message.data(), message.size());
  _exit(exit_code);
}

extern "C" void on_stop_signal(int) {
  if (is_deferred) {
    const std::int64_t now = now_ms();
    std::int64_t first = 0;
    if (first_signal_ms.compare_exchange_strong(first, now) || now - first < kOneSignalMs) return;
  }
  end_at_once("eaves: stopped at once\n", kStoppedExitCode);
}

extern "C" void on_bus_error(int, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  if (address >= input_begin && address < input_end) {
    end_at_once("eaves: --input: the file was cut short while it was read\n", kWrongArgumentOrFile);
  }
  signal(SIGBUS, SIG_DFL);  // the instruction runs again, and ends the program as if there were no handler
}

}  // namespace

void handle_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  // A shell without job control starts background programs with SIGINT ignored. They handle it here all the same.
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction hang_up {};
  sigaction(SIGHUP, nullptr, &hang_up);
  if (hang_up.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
  struct sigaction bus_error {};
  bus_error.sa_sigaction = on_bus_error;
  bus_error.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &bus_error, nullptr);
  // Ctrl-C also ends `| tee`, often before this program; its next write then fails. A failed write must not end the
  // program by a signal, nor must a limit on the size of files (ulimit -f).
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
}

void defer_stop() { is_deferred = true; }

bool is_stop_wanted() { return first_signal_ms != 0; }

void check_stop() {
  if (is_stop_wanted()) throw Stopped{"stopped"};
}

void remove_when_stopped(const char* path) { temporary_path = path; }

void expect_input_at(const void* data, std::size_t bytes) {
  input_begin = reinterpret_cast<std::uintptr_t>(data);
  input_end = reinterpret_cast<std::uintptr_t>(data) + bytes;
}

void flush_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    throw std::system_error(errno, std::generic_category(), "standard output cannot be written");
  }
}

}  // namespace eaves::cli
