// The program as its users meet it: started as a process, judged by exit code, text and files. The example of each
// --help is run as written.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/atomic_file.h"
#include "cli/run.h"
#include "cli/safetensors.h"
#include "cli/stop.h"
#include "cli/system_report.h"
#include "core/rows.h"
#include "eaves/cross_entropy.h"
#include "eaves/error.h"
#include "eaves/linear_cross_entropy.h"
#include "eaves/logsumexp.h"
#include "eaves/lrpe_cosine.h"
#include "runtime/runtime.h"

namespace eaves::cli {
namespace {

namespace fs = std::filesystem;

struct Outcome {
  int exit_code = -1;
  std::string out, err;
};

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The program of the same build, which lies in the test's folder.
std::string program_path() {
  if (const char* path = std::getenv("EAVES_PROGRAM")) return path;
  return (fs::read_symlink("/proc/self/exe").parent_path() / "eaves").string();
}

class Program : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(fs::exists(program_path())) << program_path() << " is missing; EAVES_PROGRAM can name another place";
    std::string pattern = (fs::temp_directory_path() / "eaves_test_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    write_example_input();
  }

  void TearDown() override { fs::remove_all(folder_); }

  // `line` is a shell command in the test's folder that begins with `eaves`; `before` has commands for the same shell.
  Outcome run(const std::string& line, const std::string& before = "") const {
    EXPECT_EQ(line.rfind("eaves", 0), 0u) << line;
    const std::string command = "cd '" + folder_.string() + "' && " + before + "'" + program_path() + "'" +
                                line.substr(5) + " >stdout.txt 2>stderr.txt </dev/null";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(folder_ / "stdout.txt"),
            read_text(folder_ / "stderr.txt")};
  }

  // `output` is ">/dev/full", or "| true", which has had time to end before the program writes.
  Outcome run_into(const std::string& output, const std::string& line) const {
    const std::string command = "cd '" + folder_.string() + "' && { sleep 0.1; '" + program_path() + "'" +
                                line.substr(5) + " 2>stderr.txt; echo $? >code.txt; } " + output;
    EXPECT_EQ(std::system(command.c_str()), 0) << line;
    return {std::stoi(read_text(folder_ / "code.txt")), "", read_text(folder_ / "stderr.txt")};
  }

  void expect_refusal(const std::string& line, int exit_code, const std::string& sentence,
                      const std::string& before = "") const {
    const Outcome outcome = run(line, before);
    EXPECT_EQ(outcome.exit_code, exit_code) << line << "\n" << outcome.err;
    EXPECT_NE(outcome.err.find(sentence), std::string::npos)
        << line << "\nexpected: " << sentence << "\nactual:   " << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_EQ(outcome.out, "") << line;
    EXPECT_FALSE(fs::exists(folder_ / "out.safetensors")) << line;
    EXPECT_EQ(temporary_files(), 0) << line;
  }

  // As run(), but does not wait. Signals are not ignored, as they may be if the test itself runs in the background.
  pid_t start(std::vector<const char*> words) const {
    const std::string program = program_path();
    words.insert(words.begin(), "eaves");
    words.push_back(nullptr);
    fs::remove(folder_ / "stdout.txt");
    const pid_t child = fork();
    if (child != 0) return child;
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_DFL);
    const auto open_for = [](const char* name, int descriptor) {
      return dup2(open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600), descriptor) == descriptor;
    };
    if (chdir(folder_.c_str()) != 0 || !open_for("stdout.txt", 1) || !open_for("stderr.txt", 2)) _exit(126);
    execv(program.c_str(), const_cast<char* const*>(words.data()));
    _exit(127);
  }

  Outcome stop(pid_t child, int signal) const {
    EXPECT_EQ(kill(child, signal), 0);
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(folder_ / "stdout.txt"),
            read_text(folder_ / "stderr.txt")};
  }

  template <typename Condition>
  static void wait_until(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(180);
    while (!condition() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(condition());
  }

  int temporary_files() const {
    int count = 0;
    for (const auto& entry : fs::directory_iterator(folder_)) count += entry.path().extension() == ".tmp";
    return count;
  }

  void write_file(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }

  // x is float32 [3, 4] at an odd address; the others have the shape that each test needs.
  void write_example_input() const {
    std::string header = R"({"odd":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                         R"("x":{"dtype":"F32","shape":[3,4],"data_offsets":[1,49]},)"
                         R"("g":{"dtype":"F32","shape":[3],"data_offsets":[49,61]},)"
                         R"("flags":{"dtype":"BOOL","shape":[4],"data_offsets":[61,65]},)"
                         R"("wide":{"dtype":"F64","shape":[2],"data_offsets":[65,81]},)"
                         R"("logits":{"dtype":"F32","shape":[3,4],"data_offsets":[81,129]},)"
                         R"("targets":{"dtype":"I64","shape":[3],"data_offsets":[129,153]},)"
                         R"("q":{"dtype":"F32","shape":[1,3,2,2],"data_offsets":[153,201]},)"
                         R"("theta":{"dtype":"F32","shape":[2,1],"data_offsets":[201,209]},)"
                         R"("head":{"dtype":"F32","shape":[3,4],"data_offsets":[209,257]},)"
                         R"("small":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[257,259]}})";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    std::string data(259, '\0');
    std::memcpy(&data[1], kX, sizeof(kX));
    std::memcpy(&data[49], kG, sizeof(kG));
    data[61] = 1;
    const double wide[2] = {0.25, -0.5};
    std::memcpy(&data[65], wide, 16);
    std::memcpy(&data[81], kX, sizeof(kX));
    std::memcpy(&data[129], kTargets, sizeof(kTargets));
    std::memcpy(&data[153], kX, sizeof(kX));
    std::memcpy(&data[201], kTheta, sizeof(kTheta));
    std::memcpy(&data[209], kHead, sizeof(kHead));
    std::string length(8, '\0');
    for (int i = 0; i < 8; ++i) length[static_cast<std::size_t>(i)] = static_cast<char>(header.size() >> (8 * i));
    write_file("in.safetensors", length + header + data);
  }

  struct Result {
    DType dtype;
    Dims shape;
    std::vector<float> values;
  };

  // A float32 tensor of out.safetensors.
  Result read_result(const std::string& name) const {
    const MappedFile file("test", (folder_ / "out.safetensors").string());
    const StoredTensors tensors = parse_safetensors(file.bytes(), "out.safetensors");
    const StoredTensor& tensor = tensors.at(name);
    Result result{*tensor.dtype, tensor.shape, std::vector<float>(tensor.data.size() / sizeof(float))};
    std::memcpy(result.values.data(), tensor.data.data(), tensor.data.size());  // the format aligns nothing
    return result;
  }

  static constexpr float kX[12] = {0.0f, 1.0f, -1.0f, 0.5f, 2.0f, 2.0f, 2.0f, 2.0f, -3.0f, 80.0f, 7.0f, 0.25f};
  static constexpr float kG[3] = {1.0f, -2.0f, 0.5f};
  static constexpr float kTheta[2] = {1.0f, 0.25f};
  static constexpr std::int64_t kTargets[3] = {1, -100, 2};
  static constexpr float kHead[12] = {0.5f, -1.0f, 0.25f, 0.0f, 0.125f, 0.0f, 1.0f, -0.5f, 0.0f, 0.25f, -0.5f, 1.0f};
  fs::path folder_;
};

TEST_F(Program, ExampleOfEachHelpRuns) {
  std::vector<std::string> commands = {"eaves", "eaves info", "eaves bench", "eaves run"};
  for (const RunOperator& item : run_operators()) commands.push_back("eaves run " + item.name);
  for (const std::string& command : commands) {
    const Outcome help = run(command + " --help");
    EXPECT_EQ(help.exit_code, 0);
    const std::size_t example = help.out.find("Example:\n  ");
    ASSERT_NE(example, std::string::npos) << command << " --help shows no example:\n" << help.out;
    const std::size_t begin = example + std::strlen("Example:\n  ");
    const std::string line = help.out.substr(begin, help.out.find('\n', begin) - begin);
    EXPECT_EQ(line.rfind(command, 0), 0u) << line;
    const Outcome outcome = run(line);
    EXPECT_EQ(outcome.exit_code, 0) << line << "\n" << outcome.err;
    EXPECT_EQ(outcome.err, "") << line;
  }
}

TEST_F(Program, InfoNamesVersionAndCpuAndIsTheSameInJson) {
  const Outcome text = run("eaves info");
  const Outcome json_text = run("eaves info --json");
  EXPECT_EQ(json_text.exit_code, 0);
  const auto json = nlohmann::json::parse(json_text.out);
  EXPECT_NE(text.out.find(json["version"].get<std::string>()), std::string::npos) << text.out;
  EXPECT_NE(text.out.find(json["cpu"]["level"].get<std::string>()), std::string::npos) << text.out;
  EXPECT_NE(text.out.find(json["cpu"]["matrix_products"].get<std::string>()), std::string::npos) << text.out;
  EXPECT_GE(json["cpu"]["threads"].get<int>(), 1);
  EXPECT_EQ(json["gpus"].size(), static_cast<std::size_t>(runtime::gpu_count()));
  for (const auto& sentence : json["missing"]) {
    EXPECT_NE(text.out.find(sentence.get<std::string>()), std::string::npos) << text.out;
  }
}

// It takes minutes under a sanitizer.
TEST_F(Program, SelfTestSlowlyComparesEveryFamilyOnEveryDevice) {
  const Outcome outcome = run("eaves info --self-test");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(outcome.out.find("differs"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find(run("eaves info").out), std::string::npos) << outcome.out;
  for (const char* family : {"logsumexp", "cross_entropy", "product", "linear_cross_entropy", "lrpe_cosine"}) {
    for (const char* device : {"cpu", "gpu 0"}) {
      if (std::string(device) != "cpu" && runtime::gpu_count() == 0) continue;
      EXPECT_NE(outcome.out.find(fmt::format("| {:<6} | {:<20} |", device, family)), std::string::npos) << outcome.out;
    }
  }
}

TEST_F(Program, BenchPrintsTablesAndASummaryAndWritesTheResultFile) {
  const Outcome outcome =
      run("eaves bench logsumexp --device cpu --max-bytes 2M --repetitions 2 --warm-up-ms 0 --json result.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "") << "progress is for terminals";
  for (const char* text : {"\nlogsumexp forward, batch 1, dim 256, bfloat16\n", "\nn 1024 ",
                           "\nn 131072: skipped: it moves", "\nsummary: eaves / limit\n", "\nlogsumexp, backward "}) {
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text << " is missing in\n" << outcome.out;
  }
  const auto json = nlohmann::json::parse(read_text(folder_ / "result.json"));
  EXPECT_EQ(json["schema"], 1);
  ASSERT_GT(json["rows"].size(), 2u);
  EXPECT_EQ(json["rows"][0]["provider"], "eaves");
  EXPECT_GT(json["rows"][0]["ms"].get<double>(), 0.0);
  EXPECT_EQ(json["rows"][1]["provider"], "limit");
  EXPECT_EQ(json["rows"][1]["repetitions"], 2);
  EXPECT_EQ(temporary_files(), 0);
}

TEST_F(Program, BenchMeasuresEachRowOnceAndNamesItsOptions) {
  struct Expected {
    const char* op;
    const char* max_bytes;
    nlohmann::json shape, options;  // of the first row
    std::set<std::string> keys;     // of the options
  };
  const Expected operators[] = {
      {"logsumexp", "1M", {{"batch", 1}, {"dim", 256}, {"n", 1024}}, nlohmann::json::object(), {"axes"}},
      {"cross_entropy",
       "9M",
       {{"batch", 256}, {"v", 1024}},
       {{"reduction", "mean"}},
       {"argmax", "class_axis", "entropy", "ignored_rows", "in_place", "label_smoothing", "reduction", "soft_targets",
        "softcap", "weight", "z_loss"}},
      {"linear_cross_entropy",
       "7M",
       {{"batch", 512}, {"dim", 1024}, {"v", 1024}},
       {{"reduction", "mean"}, {"algorithm", "speed"}, {"data", "spread"}},
       {"algorithm", "data", "grad_head", "grad_hidden", "ignored_rows", "logits", "reduction", "skip_ignored"}},
      {"lrpe_cosine",
       "5M",
       {{"batch", 1}, {"head", 12}, {"dim", 128}, {"n", 512}},
       nlohmann::json::object(),
       {"activation", "activation_dim", "extra_tokens", "grad_theta", "grid", "layout"}}};
  for (const auto& [op, max_bytes, shape, options, keys] : operators) {
    const Outcome outcome = run(fmt::format(
        "eaves bench {} --device cpu --max-bytes {} --repetitions 1 --warm-up-ms 0 --json result.json", op, max_bytes));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    const auto json = nlohmann::json::parse(read_text(folder_ / "result.json"));
    const auto& first = json["rows"][0];
    EXPECT_EQ(first["shape"], shape);
    EXPECT_EQ(first["options"], options);
    EXPECT_GT(first["ms"].get<double>(), 0.0);
    EXPECT_EQ(first.contains("tflops"), op == std::string("linear_cross_entropy"));
    std::set<std::string> names, cases;
    for (const auto& row : json["rows"]) {
      EXPECT_EQ(row["op"], op);
      for (const auto& [key, value] : row["options"].items()) names.insert(key);
      // Both the options' rows and the vocabularies' rows of cross_entropy contain the plain loss.
      const auto& own = row["options"];
      const bool is_plain_loss = op == std::string("cross_entropy") && own.size() - own.contains("in_place") == 1;
      std::string name;
      for (const char* key : {"mode", "dtype", "shape", "options", "provider"}) name += row[key].dump() + " ";
      EXPECT_TRUE(cases.insert(name).second || is_plain_loss) << name << "is measured twice";
    }
    EXPECT_EQ(names, keys) << op;
  }
}

TEST_F(Program, BenchTakesAShapeOfTheUsersOwn) {
  struct Expected {
    const char* arguments;
    const char* title;
    nlohmann::json shape, options;
    std::vector<std::string> modes;
  };
  const Expected cases[] = {{"logsumexp --shape rows=3,n=40",
                             "\nlogsumexp batch 3, n 40, bfloat16\n",
                             {{"batch", 3}, {"n", 40}},
                             {},
                             {"fwd", "bwd"}},
                            {"cross_entropy --dtype fp32 --shape v=40,rows=3",
                             "\ncross_entropy batch 3, v 40, reduction mean, float32\n",
                             {{"batch", 3}, {"v", 40}},
                             {{"reduction", "mean"}},
                             {"fwd", "bwd", "fwd+bwd"}},
                            {"linear_cross_entropy --shape rows=3,dim=8,v=40",
                             "\nlinear_cross_entropy batch 3, dim 8, v 40, reduction mean, data dense, bfloat16\n",
                             {{"batch", 3}, {"dim", 8}, {"v", 40}},
                             {{"reduction", "mean"}, {"algorithm", "speed"}, {"data", "dense"}},
                             {"fwd+bwd", "fwd+bwd", "fwd+bwd", "fwd"}},
                            {"lrpe_cosine --shape batch=2,length=5,heads=3,dim=8",
                             "\nlrpe_cosine batch 2, head 3, dim 8, n 5, bfloat16\n",
                             {{"batch", 2}, {"head", 3}, {"dim", 8}, {"n", 5}},
                             {},
                             {"fwd", "bwd"}},
                            {"lrpe_cosine --shape batch=2,grid=4x6,heads=3,dim=8",
                             "\nlrpe_cosine batch 2, head 3, dim 8, n 24, grid [4,6], bfloat16\n",
                             {{"batch", 2}, {"head", 3}, {"dim", 8}, {"n", 24}},
                             {{"grid", {4, 6}}},
                             {"fwd", "bwd"}}};
  for (const auto& [arguments, title, shape, options, modes] : cases) {
    const Outcome outcome = run(std::string("eaves bench ") + arguments +
                                " --device cpu --repetitions 1 --warm-up-ms 0 --json result.json");
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_NE(outcome.out.find(title), std::string::npos) << outcome.out;
    const auto rows = nlohmann::json::parse(read_text(folder_ / "result.json"))["rows"];
    ASSERT_EQ(rows.size(), 2 * modes.size());
    for (std::size_t i = 0; i < modes.size(); ++i) {
      EXPECT_EQ(rows[2 * i]["mode"], modes[i]);
      EXPECT_EQ(rows[2 * i]["shape"], shape);
      EXPECT_GT(rows[2 * i]["ms"].get<double>(), 0.0);
    }
    EXPECT_EQ(rows[0]["options"], options.is_null() ? nlohmann::json::object() : options) << arguments;
  }
}

TEST_F(Program, BenchWithANamedDtypeMeasuresNoOther) {
  const Outcome outcome = run("eaves bench --device cpu --dtype fp32 --max-bytes 2M --repetitions 1 --warm-up-ms 0");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find(", float32\n"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find("bfloat16"), std::string::npos) << outcome.out;
}

TEST_F(Program, BenchThatLeavesOutEveryRowSaysSo) {
  const Outcome outcome = run("eaves bench --device cpu --max-bytes 1 --warm-up-ms 0");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE(outcome.err.find("--max-bytes: is 1, which skips every row; expected a larger limit"), std::string::npos)
      << outcome.err;
}

TEST_F(Program, WrongArgumentsAreNamed) {
  expect_refusal("eaves run logsumexp --input a --tensor x --dims '' --output b", 2,
                 "--dims: is empty, expected a value");
  expect_refusal("eaves", 2, "A subcommand is required");
  expect_refusal("eaves paint", 2, "there is no command \"paint\", expected one of: ");
  expect_refusal("eaves run paint", 2, "there is no command \"paint\", expected one of: logsumexp, cross_entropy, ");
  expect_refusal("eaves info --loud", 2, "unknown option --loud (see eaves info --help");
  expect_refusal("eaves info loud", 2, "loud");
  expect_refusal("eaves info --json --self-test", 2, "--self-test");
  expect_refusal("eaves paint --loud", 2, "there is no command \"paint\", expected one of: ");
  expect_refusal("eaves bench --treads 2", 2,
                 "unknown option --treads; did you mean --threads? (see eaves bench --help");
  expect_refusal("eaves bench --threds=2", 2, "unknown option --threds; did you mean --threads?");
  expect_refusal("eaves bench -threads 2", 2, "unknown option -threads; did you mean --threads?");
  expect_refusal("eaves run logsumexp --inptu in.safetensors", 2,
                 "unknown option --inptu; did you mean --input? (see eaves run logsumexp --help");
  expect_refusal("eaves run linear_cross_entropy --work 2", 2,
                 "unknown option --work; did you mean --workspace-limit?");
  expect_refusal("eaves bench logsumexq", 2, "bench: there is no operator \"logsumexq\", expected one of: logsumexp");
  expect_refusal("eaves bench --device tpu", 2, "--device: is \"tpu\", expected cpu, cuda");
  expect_refusal("eaves bench --sweep slow", 2, "--sweep: slow not in {quick,published}");
  expect_refusal("eaves bench --dtype fp31", 2, "--dtype: is \"fp31\", expected bfloat16 (bf16)");
  expect_refusal("eaves bench --dtype int32", 2, "--dtype: is int32, expected a floating-point type");
  expect_refusal("eaves bench --max-bytes 3X", 2, "--max-bytes: is \"3X\", expected a number of bytes");
  expect_refusal("eaves bench --shape rows=3,n=4", 2, "--shape: expected the name of one operator");
  for (const char* shape :
       {"rows=3", "rows=3,n=0", "rows=3,n=4,n=5", "rows=3,n", "rows=3,n=4x5", "rows=3,v=5", "rows=3,n=4,"}) {
    expect_refusal(
        fmt::format("eaves bench logsumexp --shape {}", shape), 2,
        fmt::format("--shape: is \"{}\", expected a positive size for each axis of logsumexp: rows=...,n=...", shape));
  }
  expect_refusal("eaves bench lrpe_cosine --shape batch=1,length=4,grid=2x2,heads=1,dim=2", 2,
                 "length=...,heads=...,dim=... (or grid=4x8x8 instead of length)");
  expect_refusal("eaves bench logsumexp --shape rows=3,n=many", 2, "--shape: is \"many\", expected up to 16 sizes");
  expect_refusal("eaves bench logsumexp --shape rows=99999999999,n=99999999999", 2, "is too large for any memory");
  expect_refusal("eaves bench --repetitions 0", 2, "--repetitions: Value 0 not in range");
  expect_refusal("eaves bench --threads -1", 2, "--threads: Value -1 not in range");
  expect_refusal("eaves bench --device cpu --json nowhere/result.json", 2,
                 "--json: nowhere/result.json cannot be written: No such file or directory");
  expect_refusal("eaves bench --device cpu --json /dev/null", 2, "--json: /dev/null exists and is not a regular file");
}

TEST_F(Program, GpuThatIsNotThereIsUnsupported) {
  if (runtime::gpu_count() == 0) {
    expect_refusal("eaves bench --device cuda", 3, "--device: is cuda, but eaves finds no GPU that it can use: ");
  } else {
    expect_refusal("eaves bench --device cuda:99", 3, "--device: is cuda:99, but eaves can use ");
  }
}

TEST_F(Program, RunReadsATensorWhereverItLies) {
  ASSERT_EQ(run("eaves run logsumexp --input in.safetensors --tensor x --output out.safetensors").exit_code, 0);
  EXPECT_EQ(read_result("out").shape, Dims{});
  EXPECT_NEAR(read_result("out").values[0], 80.0, 1e-4);
}

// A file as a user's program writes it. The program's output is compared byte by byte with the operator's results; the
// operator's own test says whether these are right.
class ProgramWithTensors : public Program {
 protected:
  using Results = std::map<std::string, TensorView>;

  void SetUp() override {
    Program::SetUp();
    if (HasFatalFailure()) return;
    const auto add = [&](const char* name, const TensorView& view) { tensors_[name] = view; };
    const auto normal = [&](const char* name, const Dims& shape) {
      add(name, arena_.normal(DType::float32, shape, tensors_.size()));
    };
    const auto filled = [&](const char* name, DType dtype, const Dims& shape, const std::vector<double>& numbers) {
      add(name, arena_.filled(dtype, shape, numbers));
    };
    normal("logits", {2, 4, 3});                               // the classes are in the middle
    filled("targets", DType::int32, {2, 3}, {3, 7, 0, 1, 2});  // 7 is the ignored class of the tests
    filled("soft", DType::float32, {2, 4, 3}, {0.1, 0.2, 0.3, 0.4, 0.0});
    filled("weight", DType::float32, {4}, {0.5, 2.0, 1.5, 0.25});
    normal("upstream", {2, 3});
    filled("of_rows", DType::float32, {2, 3}, {0.5, 2.0, 1.5, 0.0, 3.0, 1.0});
    filled("of_head_rows", DType::float32, {3}, {0.5, 2.0, 1.5});
    filled("tokens", DType::float32, {}, {16.0});
    normal("x", {3, 4});
    normal("head", {5, 4});
    normal("bias", {5});
    filled("head_targets", DType::int64, {3}, {4, 7, 0});
    filled("head_weight", DType::float32, {5}, {0.5, 2.0, 1.5});
    normal("head_upstream", {3});
    normal("q", {2, 5, 2, 4});
    normal("g", {2, 5, 2, 8});
    normal("q_heads_first", {2, 2, 5, 4});
    normal("g_heads_first", {2, 2, 5, 8});
    normal("theta", {2, 2});
    filled("offsets", DType::int64, {2}, {100, -7});
    filled("positions", DType::int32, {5}, {9, 0, 4, -3, 1000});
    filled("starts", DType::int32, {3}, {0, 2, 5});
    filled("wide", DType::float64, {2}, {0.25, -0.5});
    std::vector<NamedTensor> list;
    for (const auto& [name, view] : tensors_) list.push_back({name, view});
    AtomicFile file("test", (folder_ / "all.safetensors").string());
    write_safetensors(file, list);
    file.commit();
  }

  TensorView in(const std::string& name) const { return tensors_.at(name); }
  TensorView out(const Dims& shape, DType dtype = DType::float32) { return arena_.output(dtype, shape); }
  /// An lse of two numbers, and in `first` the view of the first.
  TensorView split_lse(Dims rows, TensorView& first, DType dtype = DType::float32) {
    Dims strides = contiguous_strides(rows);
    for (int axis = 0; axis < rows.size(); ++axis) strides[axis] *= 2;
    Dims shape = rows;
    shape.push_back(2);
    const TensorView both = out(shape, dtype);
    first = TensorView::strided(both.data, dtype, rows, strides);
    return both;
  }
  TensorView ones(const Dims& shape) { return arena_.filled(DType::float32, shape, std::vector{1.0}); }

  // The program writes these results and no others.
  void expect_written(const std::string& arguments, const Results& expected) const {
    const Outcome outcome = run("eaves run " + arguments + " --input all.safetensors --output out.safetensors");
    ASSERT_EQ(outcome.exit_code, 0) << arguments << "\n" << outcome.err;
    const MappedFile file("test", (folder_ / "out.safetensors").string());
    const StoredTensors written = parse_safetensors(file.bytes(), "out.safetensors");
    EXPECT_EQ(written.size(), expected.size()) << arguments;
    for (const auto& [name, view] : expected) {
      ASSERT_TRUE(written.contains(name)) << arguments << ": " << name;
      const StoredTensor& tensor = written.at(name);
      EXPECT_EQ(tensor.dtype, view.dtype) << arguments << ": " << name;
      ASSERT_EQ(tensor.shape, view.shape) << arguments << ": " << name;
      // A strided view is the first of an lse's two numbers; everything else is contiguous.
      const bool is_strided = view.strides != contiguous_strides(view.shape);
      const std::size_t size = size_of(view.dtype), step = is_strided ? 2 * size : size;
      for (std::size_t i = 0; i * size < tensor.data.size(); ++i) {
        const auto* expected_element = static_cast<const char*>(view.data) + i * step;
        ASSERT_EQ(std::memcmp(tensor.data.data() + i * size, expected_element, size), 0)
            << arguments << ": element " << i << " of " << name;
      }
    }
  }

  // The outputs of a loss with these flags, put into the members of the same names.
  template <typename Views>
  Results add_loss_outputs(Views& views, const CrossEntropyOptions& options, const Dims& rows,
                           const std::string& flags) {
    const auto has = [&](const char* flag) { return flags.find(flag) != flags.npos; };
    const Dims loss = options.reduction == Reduction::none ? rows : Dims{};
    Results results;
    results["loss"] = views.loss = out(loss);
    views.lse = split_lse(rows, results["lse"]);
    views.target_mass = out(rows);
    if (options.reduction == Reduction::mean) views.divisor = out({});
    if (options.z_loss_weight > 0.0) results["z_loss"] = views.z_loss = out(loss);
    if (has("--argmax")) results["argmax"] = views.argmax = out(rows, DType::int64);
    if (has("--entropy")) results["entropy"] = views.entropy = out(rows);
    if (has("--sum-sq")) results["sum_sq"] = views.sum_sq = out(rows);
    if (has("--mean-logit")) results["mean_logit"] = views.mean_logit = out(rows);
    return results;
  }

  bench::Arena arena_{kCpu};
  std::map<std::string, TensorView> tensors_;
};

const CrossEntropyOptions kEveryOption = {.ignore_index = 7,
                                          .reduction = Reduction::none,
                                          .label_smoothing = 0.25,
                                          .scale = 1.5,
                                          .softcap = 2.0,
                                          .z_loss_weight = 0.125};
constexpr const char* kEveryFlag =
    " --ignore-index 7 --reduction none --label-smoothing 0.25 --scale 1.5 --softcap 2 --z-loss 0.125 --argmax "
    "--entropy --sum-sq";

TEST_F(ProgramWithTensors, RunLogsumexp) {
  LogsumexpForwardArgs forward{.x = in("logits"), .axes = {0, 2}, .keepdim = true, .out = out({1, 4, 1})};
  forward.lse = out({1, 4, 1});
  logsumexp_forward(forward);
  expect_written("logsumexp --tensor logits --dims 0,2 --keepdim", {{"out", forward.out}, {"lse", forward.lse}});

  TensorView lse;
  forward = {.x = in("logits"), .axes = {1}, .out = out({2, 3}), .lse = split_lse({2, 3}, lse)};
  logsumexp_forward(forward);
  const LogsumexpBackwardArgs backward{
      .grad_out = in("upstream"), .x = in("logits"), .lse = forward.lse, .axes = {1}, .grad_x = out({2, 4, 3})};
  logsumexp_backward(backward);
  expect_written("logsumexp --tensor logits --dims 1 --grad upstream",
                 {{"out", forward.out}, {"lse", lse}, {"grad_x", backward.grad_x}});

  forward = {.x = in("wide"), .out = out({}), .lse = out({}, DType::float64)};
  logsumexp_forward(forward);
  expect_written("logsumexp --tensor wide --dtype float32", {{"out", forward.out}, {"lse", forward.lse}});
}

TEST_F(ProgramWithTensors, RunCrossEntropy) {
  const auto forward = [&](const std::string& flags, CrossEntropyForwardArgs args, const TensorView& grad_loss) {
    const std::string line = "cross_entropy --logits logits --class-axis 1 " + flags;
    args.logits = in("logits");
    args.class_axis = 1;
    Results results = add_loss_outputs(args, args.options, {2, 3}, flags);
    cross_entropy_forward(args);
    expect_written(line, results);
    CrossEntropyBackwardArgs backward{.grad_loss = grad_loss.is_present ? grad_loss : ones(args.loss.shape),
                                      .logits = args.logits,
                                      .targets = args.targets,
                                      .class_weight = args.class_weight,
                                      .row_weight = args.row_weight,
                                      .class_axis = 1,
                                      .options = args.options,
                                      .lse = args.lse,
                                      .target_mass = args.target_mass,
                                      .divisor = args.divisor,
                                      .grad_logits = out({2, 4, 3})};
    cross_entropy_backward(backward);
    results["grad_logits"] = backward.grad_logits;
    const std::string how = grad_loss.is_present ? " --grad upstream" : " --backward";
    expect_written(line + how, results);

    CrossEntropyForwardBackwardArgs both{.forward = args, .grad_loss = grad_loss};
    results = add_loss_outputs(both.forward, args.options, {2, 3}, flags);
    results["grad_logits"] = both.forward.logits = out({2, 4, 3});
    std::memcpy(both.forward.logits.data, args.logits.data, 24 * sizeof(float));
    both.forward.target_mass = both.forward.divisor = {};
    cross_entropy_forward_backward(both);
    expect_written(line + (grad_loss.is_present ? how : "") + " --in-place", results);
  };
  const CrossEntropyOptions ignoring{.ignore_index = 7};
  CrossEntropyForwardArgs args{.targets = in("targets"), .class_weight = in("weight"), .options = kEveryOption};
  forward("--targets targets --class-weight weight" + std::string(kEveryFlag), args, in("upstream"));
  forward("--targets targets --ignore-index 7", {.targets = in("targets"), .options = ignoring}, {});
  forward("--targets targets --ignore-index 7 --row-weight of_rows --normalizer tokens --mean-logit",
          {.targets = in("targets"), .row_weight = in("of_rows"), .normalizer = in("tokens"), .options = ignoring}, {});
  forward("--targets soft --reduction sum", {.targets = in("soft"), .options = {.reduction = Reduction::sum}}, {});
}

TEST_F(ProgramWithTensors, RunLinearCrossEntropy) {
  const auto both_ways = [&](const std::string& flags, const LinearCrossEntropyForwardArgs& args,
                             const TensorView& grad_loss, const std::string& gradients = "") {
    const LinearCrossEntropyInputs& inputs = args.inputs;
    const std::string line = "linear_cross_entropy --hidden x --head head " + flags;
    const bool is_all = gradients.empty();
    const std::string how = (grad_loss.is_present ? " --grad head_upstream"
                             : is_all             ? " --backward"
                                                  : "") +
                            (is_all ? "" : " --gradients " + gradients) + " --algorithm ";
    const auto add_gradients = [&](Results& results) {
      LinearCrossEntropyGradients made;
      if (is_all || gradients.find("hidden") == 0) results["grad_hidden"] = made.grad_hidden = out({3, 4});
      if (is_all || gradients.find("head") != gradients.npos) results["grad_head"] = made.grad_head = out({5, 4});
      if (inputs.bias.is_present && (is_all || gradients.find("bias") != gradients.npos)) {
        results["grad_bias"] = made.grad_bias = out({5});
      }
      return made;
    };
    LinearCrossEntropyForwardArgs forward = args;
    Results results = add_loss_outputs(forward.outputs, inputs.options, {3}, flags);
    linear_cross_entropy_forward(forward);
    expect_written(line, results);
    LinearCrossEntropyBackwardArgs backward{
        .grad_loss = grad_loss.is_present ? grad_loss : ones(forward.outputs.loss.shape),
        .inputs = inputs,
        .lse = forward.outputs.lse,
        .target_mass = forward.outputs.target_mass,
        .divisor = forward.outputs.divisor};
    backward.gradients = add_gradients(results);
    linear_cross_entropy_backward(backward);
    expect_written(line + how + "recompute", results);

    LinearCrossEntropyForwardBackwardArgs both{.forward = args, .grad_loss = grad_loss};
    Results speed = add_loss_outputs(both.forward.outputs, inputs.options, {3}, flags);
    both.forward.outputs.target_mass = both.forward.outputs.divisor = {};
    both.gradients = add_gradients(speed);
    linear_cross_entropy_forward_backward(both);
    expect_written(line + how + "speed", speed);
    const bool is_speed = linear_cross_entropy_algorithm({.rows = 3,
                                                          .features = 4,
                                                          .classes = 5,
                                                          .dtype = inputs.hidden.dtype,
                                                          .reduction = inputs.options.reduction,
                                                          .workspace_limit = inputs.workspace_limit}) ==
                          LinearCrossEntropyAlgorithm::speed;
    for (const char* chooses : {"auto", "memory"}) expect_written(line + how + chooses, is_speed ? speed : results);
  };
  LinearCrossEntropyForwardArgs args;
  args.inputs.hidden = in("x");
  args.inputs.head = in("head");
  args.inputs.targets = in("head_targets");
  args.inputs.options.ignore_index = 7;
  const std::string targets = "--targets head_targets --ignore-index 7";
  both_ways(targets, args, {});
  args.normalizer = in("tokens");
  args.inputs.row_weight = in("of_head_rows");
  both_ways(targets + " --row-weight of_head_rows --normalizer tokens --mean-logit", args, {});
  args.normalizer = args.inputs.row_weight = {};
  args.inputs.bias = in("bias");
  for (const char* gradients : {"hidden", "head", "bias", "hidden,bias"}) {
    both_ways(targets + " --bias bias", args, {}, gradients);
  }
  args.inputs.class_weight = in("head_weight");
  args.inputs.options = kEveryOption;
  args.inputs.skips_ignored = true;
  args.inputs.workspace_limit = 1 << 20;
  both_ways("--targets head_targets --bias bias --class-weight head_weight --skip-ignored --workspace-limit 1M" +
                std::string(kEveryFlag),
            args, in("head_upstream"));
}

TEST_F(ProgramWithTensors, RunLrpeCosine) {
  const auto heads_first = [](const TensorView& view) {
    const Dims &shape = view.shape, &strides = view.strides;
    return TensorView::strided(view.data, view.dtype, {shape[0], shape[2], shape[1], shape[3]},
                               {strides[0], strides[2], strides[1], strides[3]}, kCpu);
  };
  const auto both_ways = [&](const std::string& flags, LrpeCosineForwardArgs args, bool is_heads_first = false) {
    const std::string suffix = is_heads_first ? "_heads_first" : "";
    const TensorView q = in("q" + suffix), g = in("g" + suffix);
    const auto view = [&](const TensorView& tensor) { return is_heads_first ? tensor : heads_first(tensor); };
    Results results = {{"out", out(g.shape)}};
    args.x = view(q);
    args.angles.theta = in("theta");
    args.out = view(results["out"]);
    if (args.activation_dim == -2) results["lse"] = args.lse = out({2, 2, 2, 4});
    lrpe_cosine_forward(args);
    const std::string line = "lrpe_cosine --tensor q" + suffix + " --theta theta " + flags;
    expect_written(line, results);
    results["grad_x"] = out(q.shape);
    results["grad_theta"] = out({2, 2});
    LrpeCosineBackwardArgs backward{.grad_out = view(g), .x = args.x, .angles = args.angles};
    backward.activation = args.activation;
    backward.activation_dim = args.activation_dim;
    backward.lse = args.lse;
    backward.grad_x = view(results["grad_x"]);
    backward.grad_theta = results["grad_theta"];
    lrpe_cosine_backward(backward);
    expect_written(line + " --grad g" + suffix, results);
  };
  both_ways("", {});
  both_ways("--layout bhnd --activation relu", {.activation = Activation::relu}, true);
  both_ways("--activation sigmoid --offset 1 --offsets offsets",
            {.angles = {.offset = 1, .offsets = in("offsets")}, .activation = Activation::sigmoid});
  both_ways("--activation silu --positions positions",
            {.angles = {.positions = in("positions")}, .activation = Activation::silu});
  both_ways("--activation softmax --cu-seqlens starts",
            {.angles = {.cu_seqlens = in("starts")}, .activation = Activation::softmax});
  both_ways("--activation softmax --activation-dim -2 --grid 2,2 --extra-tokens 1 --offset 3",
            {.angles = {.grid = {2, 2}, .extra_tokens = 1, .offset = 3},
             .activation = Activation::softmax,
             .activation_dim = -2});
}

TEST_F(ProgramWithTensors, WrongArgumentsOfEachOperatorAreNamed) {
  const std::string files = " --input all.safetensors --output out.safetensors ";
  const std::string loss = "eaves run cross_entropy" + files + "--logits logits --class-axis 1 ";
  const std::string head = "eaves run linear_cross_entropy" + files + "--hidden x --head head ";
  const std::string lrpe = "eaves run lrpe_cosine" + files + "--tensor q --theta theta ";
  const std::string in_loss = loss + "--targets targets --ignore-index 7 ";
  const std::string in_head = head + "--targets head_targets --ignore-index 7 ";
  for (const RunOperator& item : run_operators()) expect_refusal("eaves run " + item.name, 2, "--input is required");
  expect_refusal(loss, 2, "--targets is required");
  expect_refusal("eaves run lrpe_cosine --tensor q" + files, 2, "--theta is required");
  expect_refusal("eaves run linear_cross_entropy --hidden x --targets targets" + files, 2, "--head is required");

  // Each flag that names a tensor.
  const auto expect_names = [&](const std::string& line, std::initializer_list<const char*> flags) {
    for (const std::string flag : flags) {
      expect_refusal(line + flag + " nothing", 2,
                     flag + ": all.safetensors has no tensor \"nothing\", expected one of");
      expect_refusal(line + flag + " ''", 2, flag + ": is empty, expected a value");
    }
  };
  expect_names(in_loss, {"--class-weight", "--normalizer", "--grad"});
  expect_names(loss, {"--targets"});
  expect_names(in_head, {"--bias", "--class-weight", "--normalizer", "--grad"});
  expect_names(lrpe, {"--offsets", "--positions", "--cu-seqlens", "--grad"});

  for (const std::string& line : {in_loss, in_head}) {
    expect_refusal(line + "--grad upstream --backward", 2, "--backward: is given beside --grad, expected one of them");
    expect_refusal(line + "--reduction max", 2, "--reduction: max not in {none,sum,mean}");
    expect_refusal(line + "--label-smoothing lots", 2, "--label-smoothing");
  }
  expect_refusal(in_head + "--gradients y", 2, "--gradients: y not in {hidden,head,bias}");
  expect_refusal(in_head + "--gradients hidden,bias", 2, "--gradients: has bias, but the head has none; pass --bias");
  expect_refusal(in_head + "--algorithm fast", 2, "--algorithm: fast not in {auto,speed,memory,recompute}");
  expect_refusal(in_head + "--workspace-limit -1", 2,
                 "--workspace-limit: is \"-1\", expected a number of bytes such as 4096, 64M or 2G");
  expect_refusal(lrpe + "--grid ''", 2, "--grid: is empty, expected a value");
  expect_refusal(lrpe + "--grid 5,x", 2, "--grid: is \"5,x\", expected up to 16 sizes such as 8 or 4,8,8");
  expect_refusal(lrpe + "--layout nhd", 2, "--layout: nhd not in {bnhd,bhnd}");
  expect_refusal(lrpe + "--activation tanh", 2, "--activation: tanh not in {none,relu,sigmoid,silu,softmax}");
  expect_refusal(lrpe + "--offset far", 2, "--offset");
  const std::string theta_as_x = "eaves run lrpe_cosine --tensor theta --theta theta" + files;
  expect_refusal(theta_as_x, 2, "--tensor has shape [2, 2], expected four axes (batch, positions, heads, features)");
  expect_refusal(theta_as_x + "--layout bhnd", 2, "expected four axes (batch, heads, positions, features)");
  expect_refusal(lrpe + "--grad theta", 2, "lrpe_cosine: --grad has shape [2, 2], expected four axes");
  expect_refusal(lrpe + "--grad q", 2, "--grad has shape [2, 5, 2, 4], expected [2, 5, 2, 8] (as out)");

  // The core's refusals, before anything is written: of the forward, and of a backward behind it.
  expect_refusal(loss + "--targets targets", 2,
                 "eaves: cross_entropy: --targets[0, 1] is 7, expected 0 to 3, or --ignore-index -100");
  expect_refusal(in_loss + "--label-smoothing 1.5", 2, ": --label-smoothing is 1.5, expected 0 to 1");
  expect_refusal(in_loss + "--z-loss -1", 2,
                 ": --z-loss is -1, expected 0 or a positive number in the range of float32");
  expect_refusal(in_loss + "--class-weight head_weight", 2,
                 "cross_entropy: --class-weight has shape [5], expected [4] (one per class of --logits)");
  expect_refusal("eaves run cross_entropy --logits logits --targets targets --class-axis 3" + files, 2,
                 ": --class-axis is 3, expected -3 to 2 (--logits has 3 axes)");
  for (const char* how : {"", " --in-place"}) expect_refusal(in_loss + "--grad upstream" + how, 2, ": --grad has ");
  for (const char* how : {"speed", "memory", "recompute"}) {
    expect_refusal(in_head + "--grad upstream --algorithm " + how, 2, ": --grad has ");
  }
  expect_refusal("eaves run linear_cross_entropy --hidden tokens --head head --targets targets" + files, 2,
                 "linear_cross_entropy: --hidden has no axis, expected [..., features]");
  expect_refusal(in_head + "--bias upstream --backward", 2, ": --bias has shape ");
  expect_refusal(in_head + "--class-weight weight", 2,
                 ": --class-weight has shape [4], expected [5] (one per class of --head)");
  expect_refusal("eaves run linear_cross_entropy --hidden x --head logits --targets targets" + files, 2,
                 ": --head has shape [2, 4, 3], expected [1, 4] ([classes, features of --hidden])");
  expect_refusal(lrpe + "--positions positions --cu-seqlens starts", 2, ": --cu-seqlens is given beside --positions");
  expect_refusal(lrpe + "--cu-seqlens starts --activation softmax --activation-dim -2", 3,
                 ": --cu-seqlens is given with a softmax over the sequence");
}

TEST(RunOperators, TheCoresSentencesAreSaidInFlags) {
  struct Said {
    std::string op;
    InvalidArgument error;
    std::string expected;
  };
  const std::vector<Said> all = {
      {"logsumexp", {"logsumexp_forward", "`axes` is [0, 0]"}, "logsumexp: --dims is [0, 0]"},
      {"logsumexp", {"logsumexp_backward", "`grad_out` is int8 (as `x`)"}, "logsumexp: --grad is int8 (as --tensor)"},
      {"cross_entropy",
       {"cross_entropy_forward", "`targets`[3] is 7 (soft targets: as `logits`)"},
       "cross_entropy: --targets[3] is 7 (soft targets: as --logits)"},
      {"cross_entropy",
       {"cross_entropy_backward", "`class_weight` and `label_smoothing` are given"},
       "cross_entropy: --class-weight and --label-smoothing are given"},
      {"lrpe_cosine",
       {"lrpe_cosine_forward", "`out` has positions, beside an `offset`"},
       "lrpe_cosine: out has positions, beside an --offset"},
      {"lrpe_cosine", InvalidArgument("--offset: `x` is no offset"), "--offset: `x` is no offset"},  // not the core's
  };
  for (const auto& [op, error, expected] : all) {
    const auto found = std::find_if(run_operators().begin(), run_operators().end(),
                                    [&](const RunOperator& item) { return item.name == op; });
    ASSERT_NE(found, run_operators().end()) << op;
    EXPECT_EQ(in_flags(*found, error), expected);
  }
}

TEST_F(Program, RunReplacesAnEarlierOutputAndFollowsALink) {
  const std::string line = "eaves run logsumexp --input in.safetensors --tensor x --output out.safetensors";
  fs::create_directory(folder_ / "folder");
  fs::create_symlink("folder/link", folder_ / "out.safetensors");
  fs::create_symlink("target", folder_ / "folder" / "link");
  for (const char* before : {"no file", "old"}) {
    if (before == std::string("old")) write_file("folder/target", before);
    ASSERT_EQ(run(line).exit_code, 0) << before;
    EXPECT_TRUE(fs::is_symlink(folder_ / "out.safetensors"));
    EXPECT_TRUE(fs::is_regular_file(folder_ / "folder" / "target"));
    EXPECT_EQ(read_result("out").values.size(), 1u);
    EXPECT_EQ(temporary_files(), 0);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_ / "folder"), {}), 2);
  }
}

TEST_F(Program, RunLeavesAReadOnlyOutputAlone) {
  write_file("kept", "old");
  fs::permissions(folder_ / "kept", fs::perms::owner_read);
  fs::create_symlink("loop", folder_ / "loop");
  const std::string line = "eaves run logsumexp --input in.safetensors --tensor x --output ";
  expect_refusal(line + "kept", 2, "--output: kept cannot be written: Permission denied");
  expect_refusal("eaves bench --device cpu --json kept", 2, "--json: kept cannot be written: Permission denied");
  expect_refusal(line + "loop", 2, "--output: loop cannot be written: Too many levels of symbolic links");
  EXPECT_EQ(read_text(folder_ / "kept"), "old");
}

TEST_F(Program, RunThatReachesALimitOnTheSizeOfFilesSaysSo) {
  expect_refusal(
      "eaves run cross_entropy --input in.safetensors --logits logits --targets targets --z-loss 0.1 --argmax "
      "--entropy "
      "--sum-sq --mean-logit --backward --output out.safetensors",
      1, "out.safetensors: cannot be written: File too large", "ulimit -f 1 && ");
}

TEST_F(Program, ReaderThatLeavesIsNoFailureAndKeepsNoFileFromBeingWritten) {
  const std::string bench = "eaves bench logsumexp --device cpu --max-bytes 2M --repetitions 1 --warm-up-ms 0";
  const std::string lines[] = {"eaves --help", "eaves run cross_entropy --help", "eaves info --json", bench,
                               bench + " --json result.json"};
  for (const std::string& line : lines) {
    const Outcome left = run_into("| true", line);
    EXPECT_EQ(left.exit_code, 0) << line << "\n" << left.err;
    EXPECT_EQ(left.err, "") << line;
    EXPECT_EQ(fs::remove(folder_ / "result.json"), line.ends_with(".json")) << line;
    const Outcome full = run_into(">/dev/full", line);
    EXPECT_EQ(full.exit_code, 1) << line;
    EXPECT_EQ(full.err, "eaves: standard output cannot be written: No space left on device\n") << line;
    EXPECT_EQ(fs::remove(folder_ / "result.json"), line.ends_with(".json")) << line;
  }
}

TEST_F(Program, WrongRunArgumentsAreNamed) {
  const std::string run_x = "eaves run logsumexp --input in.safetensors --tensor x ";
  const std::string out = " --output out.safetensors";
  expect_refusal("eaves run", 2, "subcommand is required");
  expect_refusal("eaves run logsumexp", 2, "--input is required");
  expect_refusal(run_x, 2, "--output is required");
  expect_refusal(run_x + "--dims one" + out, 2, "--dims: is \"one\", expected up to 16 axes such as -1 or 0,2");
  expect_refusal(run_x + "--dims 0," + out, 2, "--dims: is \"0,\"");
  expect_refusal(run_x + "--dims 2" + out, 2, "--dims contains 2, expected -2 to 1 (--tensor has 2 axes)");
  expect_refusal(run_x + "--dims 0,0" + out, 2, "logsumexp: --dims is [0, 0], expected each axis once");
  expect_refusal(run_x + "--dtype int8" + out, 2, "out has dtype int8");
  expect_refusal(run_x + "--grad wide" + out, 2, "logsumexp: --grad has ");
  expect_refusal(
      "eaves run logsumexp --input in.safetensors --tensor y" + out, 2,
      "--tensor: in.safetensors has no tensor \"y\", expected one of: \"flags\", \"g\", \"head\", \"logits\"");
  expect_refusal("eaves run logsumexp --input in.safetensors --tensor small" + out, 2,
                 "--tensor: tensor \"small\" of in.safetensors has dtype F8_E4M3, which is unsupported");
  expect_refusal(run_x + "--output in.safetensors", 2, "--output: in.safetensors is the input file");
  expect_refusal(run_x + "--output ./../" + folder_.filename().string() + "/in.safetensors", 2, "is the input file");
  expect_refusal(run_x + "--output .", 2, "--output: . exists and is not a regular file");
  expect_refusal(run_x + "--output nowhere/out.safetensors", 2, "--output: nowhere/out.safetensors cannot be written");
}

TEST_F(Program, InputThatIsNoSafetensorsFileIsRefused) {
  const auto with_input = [](const std::string& input) {
    return "eaves run logsumexp --input " + input + " --tensor x --output out.safetensors";
  };
  write_file("empty", "");
  write_file("text", "Not a file of tensors, but long enough to have a length.");
  std::string cut = read_text(folder_ / "in.safetensors");
  cut.pop_back();
  write_file("cut", cut);
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  expect_refusal(with_input("missing"), 2, "--input: missing cannot be read: No such file or directory");
  expect_refusal(with_input("."), 2, "--input: . is a folder, expected a safetensors file");
  expect_refusal(with_input("fifo"), 2, "--input: fifo is not a regular file");
  expect_refusal(with_input("empty"), 2, "empty: has 0 bytes, too few for a safetensors file");
  expect_refusal(with_input("text"), 2, "text: the header length is");
  expect_refusal(
      with_input("cut"), 2,
      "cut: \"small\" has data_offsets [257, 259], but the file has 258 bytes of data (is the file cut short?)");
}

// 128 MiB of zeros that take no room on the disk: long enough to be caught in the middle of a run.
void write_large_input(const fs::path& path) {
  const std::string header = R"({"g":{"dtype":"F32","shape":[32],"data_offsets":[0,128]},)"
                             R"("x":{"dtype":"F32","shape":[32,1048576],"data_offsets":[128,134217856]}})";
  std::string length(8, '\0');
  length[0] = static_cast<char>(header.size());
  std::ofstream(path, std::ios::binary) << length << header;
  fs::resize_file(path, 8 + header.size() + 134217856);
}

const std::vector<const char*> kLargeRun = {"run",      "logsumexp", "--input",  "large.safetensors",
                                            "--tensor", "x",         "--dims",   "-1",
                                            "--grad",   "g",         "--output", "out.safetensors"};

TEST_F(Program, RunThatIsKilledLeavesNoHalfFile) {
  write_large_input(folder_ / "large.safetensors");
  const pid_t child = start(kLargeRun);
  // The temporary file appears before the work begins.
  wait_until([&] { return temporary_files() == 1; });
  EXPECT_EQ(kill(child, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << "the run was over before it could be killed";
  EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
}

TEST_F(Program, RunThatIsStoppedLeavesNoFileAtAll) {
  write_large_input(folder_ / "large.safetensors");
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const pid_t child = start(kLargeRun);
    wait_until([&] { return temporary_files() == 1; });
    const Outcome outcome = stop(child, signal);
    EXPECT_EQ(outcome.exit_code, 130) << strsignal(signal);
    EXPECT_EQ(outcome.err, "eaves: stopped at once\n");
    EXPECT_EQ(temporary_files(), 0);
    EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
  }
}

TEST_F(Program, InputThatIsCutShortMeanwhileEndsTheRunWithASentence) {
  write_large_input(folder_ / "large.safetensors");
  const pid_t child = start(kLargeRun);
  wait_until([&] { return temporary_files() == 1; });
  fs::resize_file(folder_ / "large.safetensors", 4096);
  const Outcome outcome = stop(child, 0);
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_EQ(outcome.err, "eaves: --input: the file was cut short while it was read\n");
  EXPECT_EQ(temporary_files(), 0);
  EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
}

TEST_F(Program, InputThatIsWrittenMeanwhileIsRefused) {
  const fs::path path = folder_ / "in.safetensors";
  for (const std::uintmax_t size : {fs::file_size(path) - 1, fs::file_size(path)}) {
    const MappedFile file("--input", path.string());
    file.check_unchanged();
    fs::resize_file(path, size);
    fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1));  // clocks may be coarse
    EXPECT_THROW(file.check_unchanged(), InvalidArgument) << size;
  }
}

TEST_F(Program, BenchThatIsStoppedWritesWhatItHasMeasured) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const pid_t child = start({"bench", "--device", "cpu", "--max-bytes", "8M", "--repetitions", "5", "--warm-up-ms",
                               "0", "--json", "all.json"});
    // The first of several tables.
    wait_until([&] { return read_text(folder_ / "stdout.txt").find("limit  ratio") != std::string::npos; });
    const Outcome outcome = stop(child, signal);
    EXPECT_EQ(outcome.exit_code, 130) << strsignal(signal);
    EXPECT_EQ(outcome.out.back(), '\n');
    EXPECT_EQ(temporary_files(), 0);
    const auto json = nlohmann::json::parse(read_text(folder_ / "all.json"));
    EXPECT_EQ(json["stopped"], true);
    const auto rows = std::count_if(json["rows"].begin(), json["rows"].end(), [](const nlohmann::json& row) {
      return row["provider"] == "eaves" && !row["ms"].is_null();
    });
    EXPECT_GE(rows, 1);
    const std::string place = fmt::format("{} measured row{} in all.json", rows, rows == 1 ? " is" : "s are");
    EXPECT_EQ(outcome.err, fmt::format("eaves: stopped; {}\n", place));
    fs::remove(folder_ / "all.json");
  }
}

TEST_F(Program, BenchThatIsStoppedBeforeTheFirstRowLeavesTheOldFile) {
  write_file("old.json", "old");
  const pid_t child = start({"bench", "logsumexp", "--device", "cpu", "--warm-up-ms", "60000", "--json", "old.json"});
  wait_until([&] { return temporary_files() == 1; });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // into the warm-up, or just before it
  const Outcome outcome = stop(child, SIGTERM);
  EXPECT_EQ(outcome.exit_code, 130);
  EXPECT_EQ(outcome.err, "eaves: stopped before the first row was measured; no file is written\n");
  EXPECT_EQ(read_text(folder_ / "old.json"), "old");
  EXPECT_EQ(temporary_files(), 0);
}

TEST_F(Program, SecondSignalEndsItAtOnceButTwoInARowAreOne) {
  const auto signal_twice = [&](int pause_ms) {
    const AtomicFile file("test", (folder_ / "result.json").string());
    handle_stop_signals();
    defer_stop();
    raise(SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    raise(SIGINT);
    std::_Exit(is_stop_wanted() ? 0 : 1);
  };
  EXPECT_EXIT(signal_twice(0), testing::ExitedWithCode(0), "");
  fs::remove(*fs::directory_iterator(folder_));
  EXPECT_EXIT(signal_twice(500), testing::ExitedWithCode(130), "^eaves: stopped at once\n$");
}

TEST(SystemReport, SaysThatCutlassIsMissingOnTheGpuThatWouldUseIt) {
  SystemInfo system;
  system.has_cuda_backend = true;
  system.gpus.push_back({.compute_capability_major = 9, .memory_bandwidth = 1e12});
  ASSERT_EQ(missing_parts(system).size(), 1u);
  EXPECT_EQ(missing_parts(system)[0].rfind("This build has no CUTLASS", 0), 0u) << missing_parts(system)[0];
  system.has_cutlass = true;
  EXPECT_TRUE(missing_parts(system).empty());
  system.has_cutlass = false;
  system.gpus[0].compute_capability_major = 8;
  EXPECT_TRUE(missing_parts(system).empty());
  system.gpus[0].compute_capability_major = 10;
  ASSERT_EQ(missing_parts(system).size(), 1u);
  EXPECT_NE(missing_parts(system)[0].find("CUDA 12.9"), std::string::npos) << missing_parts(system)[0];
  system.has_sm100 = true;
  EXPECT_TRUE(missing_parts(system).empty());
}

}  // namespace
}  // namespace eaves::cli
