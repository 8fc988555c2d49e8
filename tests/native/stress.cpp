// Works the native library hard and compares its results with themselves: built for sanitizers, and a
// test of the law without any of Python. Exits with 1 and says what differed.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "isa.h"
#include "program.h"
#include "sampling.h"
#include "thread_pool.h"

using namespace outrider;

namespace {

std::mt19937 rng(20261201);

int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

std::vector<float> normals(int64_t count, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(rng);
  return values;
}

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED (%s): %s\n", isa_name(current_isa()), what.c_str());
  std::exit(1);
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Runs `work` on teams of 1, 2 and 3 and expects the same bits.
std::vector<float> on_all_teams(const std::string& what, const std::function<std::vector<float>()>& work) {
  std::vector<float> first;
  for (int threads : {1, 2, 3, 2, 3, 1, 2}) {
    ThreadPool::global().resize(threads);
    const std::vector<float> result = work();
    if (first.empty()) first = result;
    expect(same(first, result), what + " depends on the number of threads");
  }
  return first;
}

// --- the pool ---

// Every phase reads, in another order, what the phase before wrote: a lost or doubled item, or one that
// starts too early, gives a wrong sum or a data race.
void phases_see_what_came_before() {
  for (int threads : {1, 2, 4, 3}) {
    ThreadPool::global().resize(threads);
    const int64_t items = 300;
    std::vector<int64_t> from(items, 1), to(items);
    for (int run = 0; run < 20; ++run)
      run_team([&](Team& team) {
        for (int phase = 0; phase < 20; ++phase) {
          const int64_t *read = (phase % 2 ? to : from).data();
          int64_t* write = (phase % 2 ? from : to).data();
          const auto work = [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) write[i] = read[items - 1 - i] + 1;
          };
          if (phase % 3)
            team.for_each(items, 1 + phase % 9, work);
          else
            team.for_each_share(items, 1 + phase % 9, [&](int64_t begin, int64_t end, int64_t) { work(begin, end); });
          if (phase % 7 == 0) team.barrier();
          team.for_each(0, 1, work);
        }
      });
    for (int64_t value : from) expect(value == 1 + 20 * 20, "an item was lost, doubled or too early");
  }
}

void runs_from_several_callers_take_turns() {
  ThreadPool::global().resize(2);
  int64_t total = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&] {
      for (int i = 0; i < 100; ++i)
        run_team([&](Team& team) {
          if (team.rank() == 0) total += 1;
          run_team([&](Team& inner) { expect(inner.size() == 1, "a run within a run has one thread"); });
        });
    });
  for (std::thread& caller : callers) caller.join();
  expect(total == 300, "a run was lost");
}

void sleepers_wake() {
  ThreadPool::global().resize(3);
  for (int i = 0; i < 9; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::atomic<int> ran{0};
    run_team([&](Team& team) {
      const auto nap = [&] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); };
      if (team.rank() == i % 3) nap();
      team.barrier();
      team.for_each(2, 1, [&](int64_t, int64_t) { i % 2 ? nap() : void(); });
      ran += 1;
    });
    expect(ran == 3, "a thread slept on");
  }
}

// --- linear ---

PackedWeight random_weight(int64_t n, int64_t k, int kind) {
  const std::vector<float> values = normals(n * k, 0.1f);
  if (kind == 0) return pack("f32", reinterpret_cast<const uint8_t*>(values.data()), n, k);
  return quantize(values.data(), n, k, kind < 3 ? 4 : 8, 32, kind == 2);
}

std::vector<float> linear_once(const PackedWeight& weight, const std::vector<float>& x, int64_t rows,
                               const float* norm, Epilogue epilogue) {
  const bool halves = epilogue == Epilogue::silu_mul || epilogue == Epilogue::gelu_mul;
  const int64_t columns = halves ? weight.n() / 2 : weight.n();
  std::vector<float> out(static_cast<size_t>(rows * columns), 0.5f);
  LinearArgs args;
  args.weight = &weight;
  args.x = x.data();
  args.x_stride = weight.k();
  args.rows = rows;
  args.norm_weight = norm;
  args.norm_eps = 1e-5f;
  args.epilogue = epilogue;
  args.out = out.data();
  args.out_stride = columns;
  check_linear(args);
  LinearScratch scratch;
  scratch.reserve(rows, weight.k(), ThreadPool::global().size());
  run_team([&](Team& team) { linear(team, args, scratch); });
  return out;
}

void linear_rows_stand_alone() {
  for (int round = 0; round < 24; ++round) {
    const int64_t n = draw(1, 70), k = 32 * draw(1, 5), rows = draw(1, 19);
    const int kind = round % 4;
    PackedWeight weight = random_weight(n, k, kind);
    Epilogue epilogue = round % 3 == 0 ? Epilogue::add : Epilogue::store;
    if (round % 5 == 0) {
      weight = interleave(weight, random_weight(n, k, kind));
      epilogue = round % 2 ? Epilogue::silu_mul : Epilogue::gelu_mul;
    }
    const std::vector<float> x = normals(rows * k), norm = normals(k);
    const float* norm_weight = round % 2 ? norm.data() : nullptr;
    const std::vector<float> all = on_all_teams(
        "linear", [&] { return linear_once(weight, x, rows, norm_weight, epilogue); });
    const int64_t row = draw(0, rows - 1), columns = int64_t(all.size()) / rows;
    const std::vector<float> alone =
        linear_once(weight, {x.begin() + row * k, x.begin() + (row + 1) * k}, 1, norm_weight, epilogue);
    expect(same(alone, {all.begin() + row * columns, all.begin() + (row + 1) * columns}),
           "a row of linear depends on the rows beside it");
  }
}

// --- a program: two layers, two requests ---

constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 16, kHidden = 64, kVocab = 40, kBlocks = 12, kBlockSize = 16;

Weights shared(PackedWeight weight) { return std::make_shared<const PackedWeight>(std::move(weight)); }

std::shared_ptr<const RopeTable> rope_table() {
  auto table = std::make_shared<RopeTable>();
  table->max_position = 100;
  table->rotary_dim = kHeadDim;
  table->cos = normals(100 * kHeadDim / 2);
  table->sin = normals(100 * kHeadDim / 2);
  return table;
}

struct Model {
  std::unique_ptr<Program> program;
  int logits = 0;

  explicit Model(CacheType type) {
    const int64_t q_width = kHeads * kHeadDim, kv_width = kKvHeads * kHeadDim, qkv_width = q_width + 2 * kv_width;
    auto cache = std::make_shared<KVCache>(2, kBlocks, kBlockSize, kKvHeads, kHeadDim, type);
    program = std::make_unique<Program>(
        40, 40, std::vector<int64_t>{40 * kHidden, 40 * qkv_width, 40 * q_width, 40 * kVocab}, cache);
    const int x = program->add_buffer(kHidden, 0, false), qkv = program->add_buffer(qkv_width, 1, false);
    const int attended = program->add_buffer(q_width, 2, false);
    logits = program->add_buffer(kVocab, 3, true);
    program->embedding({x, 0, kHidden}, shared(random_weight(kVocab, kHidden, 3)));
    const auto rope = rope_table();
    for (int layer = 0; layer < 2; ++layer) {
      program->linear({qkv, 0, qkv_width}, {x, 0, kHidden}, shared(random_weight(qkv_width, kHidden, 2)),
                      {normals(kHidden), 1e-5f, normals(qkv_width), Epilogue::store});
      program->append_attention({attended, 0, q_width}, {qkv, 0, q_width}, {qkv, q_width, kv_width},
                                {qkv, q_width + kv_width, kv_width},
                                {layer, kHeads, 0.25f, layer ? 7 : 0, rope, normals(kHeadDim), {}, 1e-5f});
      program->linear({x, 0, kHidden}, {attended, 0, q_width}, shared(random_weight(kHidden, q_width, 1)),
                      {{}, 0, {}, Epilogue::add});
      program->rope({x, 0, kHidden}, {x, 0, kHidden}, rope, kHidden / kHeadDim);
      program->rms_norm({x, 0, kHidden}, {x, 0, kHidden}, normals(kHidden / 2), 1e-5f, 2);
    }
    program->linear({logits, 0, kVocab}, {x, 0, kHidden}, shared(random_weight(kVocab, kHidden, 0)), {});
  }

  // Rows [first, last) of two requests with 20 more in the second.
  std::vector<float> step(int first, int last) {
    std::vector<int32_t> ids, positions, slots, start{0}, lengths, tables{4, 9, 0, 7, 2, 11}, rows;
    for (int request = 0; request < 2; ++request) {
      for (int p = first; p < last; ++p) {
        const int at = p + 20 * request;
        ids.push_back((at * 7 + request) % kVocab);
        positions.push_back(p);
        slots.push_back(tables[size_t(3 * request + p / kBlockSize)] * kBlockSize + p % kBlockSize);
        rows.push_back(int32_t(rows.size()));
      }
      start.push_back(int32_t(ids.size()));
      lengths.push_back(last);
    }
    StepInputs in;
    in.attention = {int64_t(ids.size()), 2,           positions.data(), slots.data(), start.data(),
                    lengths.data(),      tables.data(), 3};
    in.token_ids = ids.data();
    in.logits_indices = rows.data();
    in.num_logits = int64_t(rows.size());
    program->run(in);
    const float* data = program->buffer_data(logits);
    return {data, data + in.num_logits * kVocab};
  }

  // Rows of one request from position `first` on, each behind its parent (-1: it is the first).
  std::vector<float> tree(int first, const std::vector<int32_t>& ids, const std::vector<int32_t>& parents) {
    const std::vector<int32_t> tables{4, 9, 0}, start{0, int32_t(ids.size())}, lengths{first + int32_t(ids.size())};
    std::vector<int32_t> positions, slots, rows;
    for (int32_t i = 0; i < int32_t(ids.size()); ++i) {
      const int at = first + i;
      positions.push_back(parents[size_t(i)] < 0 ? first : positions[size_t(parents[size_t(i)])] + 1);
      slots.push_back(tables[size_t(at / kBlockSize)] * kBlockSize + at % kBlockSize);
      rows.push_back(i);
    }
    StepInputs in;
    in.attention = {int64_t(ids.size()), 1, positions.data(), slots.data(), start.data(),
                    lengths.data(),      tables.data(), 3, parents.data()};
    in.token_ids = ids.data();
    in.logits_indices = rows.data();
    in.num_logits = int64_t(rows.size());
    program->run(in);
    const float* data = program->buffer_data(logits);
    return {data, data + in.num_logits * kVocab};
  }
};

std::vector<int32_t> chain(size_t size) {
  std::vector<int32_t> parents(size);
  for (size_t i = 0; i < size; ++i) parents[i] = int32_t(i) - 1;
  return parents;
}

void a_tree_gives_what_its_paths_give() {
  for (CacheType type : {CacheType::f16, CacheType::bf16, CacheType::f32}) {
    Model model(type);
    model.tree(0, {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7}, chain(14));
    std::vector<int32_t> ids{7}, parents{-1};
    for (int node = 1; node < 18; ++node) {
      ids.push_back(int32_t(draw(0, kVocab - 1)));
      parents.push_back(int32_t(draw(0, node - 1)));
    }
    const std::vector<float> got = on_all_teams("a tree", [&] { return model.tree(14, ids, parents); });
    for (size_t node = 0; node < ids.size(); ++node) {
      std::vector<int32_t> path;
      for (int at = int(node); at >= 0; at = parents[size_t(at)]) path.insert(path.begin(), ids[size_t(at)]);
      const std::vector<float> want = model.tree(14, path, chain(path.size()));
      expect(!std::memcmp(&got[node * kVocab], &want[want.size() - kVocab], kVocab * sizeof(float)),
             "a node of a tree differs from plain decoding");
    }
  }
}

void a_program_gives_the_same_in_pieces() {
  for (CacheType type : {CacheType::f16, CacheType::bf16, CacheType::f32}) {
    Model model(type);
    const std::vector<float> whole = on_all_teams("a program", [&] { return model.step(0, 20); });
    ThreadPool::global().resize(2);
    int at = 0;
    while (at < 20) {
      const int next = int(std::min<int64_t>(20, at + draw(1, 6)));
      const std::vector<float> piece = model.step(at, next);
      for (int request = 0; request < 2; ++request)
        for (int p = at; p < next; ++p)
          expect(!std::memcmp(&piece[size_t((request * (next - at) + p - at) * kVocab)],
                              &whole[size_t((request * 20 + p) * kVocab)], kVocab * sizeof(float)),
                 "a row depends on how its context was computed");
      at = next;
    }
  }
}

// Arbitrary integers never reach a kernel: either the step is refused or it is in range. On one thread,
// since two requests may well write what the other reads.
void random_integers_are_refused() {
  ThreadPool::global().resize(1);
  Model model(CacheType::f16);
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    const auto ints = [&](size_t count, int64_t high) {
      std::vector<int32_t> values(count);
      for (int32_t& value : values) value = int32_t(draw(0, 30) ? draw(0, high) : draw(INT32_MIN, INT32_MAX));
      return values;
    };
    const auto ids = ints(3, kVocab - 1), positions = ints(3, 30), slots = ints(3, kBlocks * kBlockSize - 1);
    auto start = ints(3, 3);
    if (round % 2) start = {0, int32_t(draw(0, 3)), 3};
    const auto lengths = ints(2, 48), tables = ints(6, kBlocks), rows = ints(2, 2);
    auto parents = ints(3, 1);
    for (int32_t& parent : parents) parent -= draw(0, 1);
    StepInputs in;
    in.attention = {3, 2, positions.data(), slots.data(), start.data(), lengths.data(), tables.data(), 3};
    if (round % 3 == 0) in.attention.parents = parents.data();
    in.token_ids = ids.data();
    in.logits_indices = rows.data();
    in.num_logits = 2;
    try {
      model.program->run(in);
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  expect(refused > 100 && refused < 300, "random steps should be refused sometimes, not always");
}

void sampling_shares_rows() {
  const int64_t rows = 9, vocab = 300;
  const std::vector<float> logits = normals(rows * vocab, 3.0f);
  std::vector<SamplerState> states;
  std::vector<const SamplerState*> pointers;
  for (int i = 0; i < 3; ++i) {
    SamplerParams params;
    params.seed = uint64_t(i);
    params.top_k = i * 20;
    params.top_p = i == 1 ? 0.9 : 1.0;
    params.repetition_penalty = i == 2 ? 1.3f : 1.0f;
    const int32_t prompt[] = {1, 2, 3};
    states.emplace_back(params, TokenSpan{prompt, 3});
  }
  for (const SamplerState& state : states) pointers.push_back(&state);
  const std::vector<int32_t> row_state{0, 0, 1, 1, 1, 2, 2, 2, 0}, starts(size_t(rows) + 1, 0);
  const std::vector<int64_t> positions{5, 6, 5, 6, 7, 5, 6, 7, 9};
  on_all_teams("sampling", [&] {
    std::vector<int32_t> tokens(static_cast<size_t>(rows));
    sample_batch({logits.data(), rows, vocab, pointers.data(), row_state.data(), positions.data(), starts.data(), nullptr},
                 tokens.data(), nullptr);
    return std::vector<float>(tokens.begin(), tokens.end());
  });
}

}  // namespace

int main() {
  phases_see_what_came_before();
  runs_from_several_callers_take_turns();
  sleepers_wake();
  linear_rows_stand_alone();
  a_program_gives_the_same_in_pieces();
  a_tree_gives_what_its_paths_give();
  random_integers_are_refused();
  sampling_shares_rows();
  std::printf("native stress test passed (%s)\n", isa_name(current_isa()));
}
