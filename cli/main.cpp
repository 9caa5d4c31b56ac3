// The program `eaves`: reads the command line, runs one command, and turns the kinds of error into exit codes and one
// sentence on stderr.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

#include "cli/commands.h"
#include "cli/stop.h"
#include "eaves/error.h"
#include "eaves/version.h"

namespace {

constexpr int kDeviceOrSystemFailed = 1;
constexpr int kWrongArgumentOrFile = 2;
constexpr int kUnsupported = 3;

int fail(int code, const char* message) {
  std::fputs(fmt::format("eaves: {}\n", message).c_str(), stderr);  // fmt::print would throw where stderr is closed
  return code;
}

// The parser's sentence, the word that it does not mention where a command is misspelt, and where to look.
std::string describe(const CLI::App& program, const CLI::ParseError& error) {
  std::string message = error.what();
  const auto unexpected = program.remaining(true);
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && !unexpected.empty()) {
    message = fmt::format("\"{}\" was not expected: {}", unexpected.front(), message);
  }
  std::string command = "eaves";
  for (const CLI::App* app = &program; !app->get_subcommands().empty();) {
    app = app->get_subcommands().front();
    command += " " + app->get_name();
  }
  return fmt::format("{} ({} --help shows what is expected)", message, command);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program{"Fused operators at the limit of the hardware: measure them, apply them to files, see what is here.",
                   "eaves"};
  program.footer(
      "Example:\n  eaves info\n\n"
      "Exit codes: 0 done; 1 the device or the system failed (out of memory, disk full);\n"
      "2 an argument or an input file is wrong; 3 this build or this machine cannot do it;\n"
      "130 it was stopped (Ctrl-C, SIGTERM, SIGHUP), and left no temporary file.");
  program.set_version_flag("--version", EAVES_VERSION);
  program.require_subcommand(1);
  eaves::cli::handle_stop_signals();
  try {
    eaves::cli::add_info_command(program);
    eaves::cli::add_bench_command(program);
    eaves::cli::add_run_command(program);
    program.parse(argc, argv);
    const bool is_written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
    return is_written ? 0 : fail(kDeviceOrSystemFailed, "standard output cannot be written");
  } catch (const CLI::Success& request) {  // --help, --version
    return program.exit(request);
  } catch (const CLI::ParseError& error) {
    return fail(kWrongArgumentOrFile, describe(program, error).c_str());
  } catch (const eaves::InvalidArgument& error) {
    return fail(kWrongArgumentOrFile, error.what());
  } catch (const eaves::Unsupported& error) {
    return fail(kUnsupported, error.what());
  } catch (const eaves::cli::Stopped& stopped) {
    return fail(eaves::cli::kStoppedExitCode, stopped.message.c_str());
  } catch (const std::exception& error) {
    return fail(kDeviceOrSystemFailed, error.what());
  }
}
