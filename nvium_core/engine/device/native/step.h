// A Step in one call: rows through blocks, and what their fronts emit; several tokens a sequence where nobody waits for them.
#pragma once

#include "decide.h"
#include "score.h"

namespace nvium {

struct BlockReport {
  int64_t num_steps, num_rows;
  double seconds;
};

struct Call {
  int64_t first, stop;  // of the blocks
  int64_t whole;        // every row passes all of them; else a run ends where its front emits
  int64_t num_runs;
  Run* runs;
  Seat* seats;
  int64_t max_rows;  // of a later block in one call, unless whole
  double seconds;    // no further token is begun after this long
  int64_t num_threads;
  int64_t is_tiled;  // products by tiles
  Scores scores;
  BlockReport* reports;  // [N]
  double router_seconds, head_seconds;
};

template <typename T> class Calls {
  using A = Accumulator<T>;
  using F = Front<A>;

 public:
  Calls(const Model<T>& model, Call& call) : model_(model), call_(call) {}

  void run() {
    Clock clock;
    double seconds = 0;
    do {
      pass();
      ++num_passes_;
      call_.first = 0;
      seconds += clock.lap();
    } while (seconds < call_.seconds && all_go_on());
  }

 private:
  int num_threads() const { return static_cast<int>(call_.num_threads); }

  // One token of each run at most.
  void pass() {
    const int64_t last = model_.num_blocks - 1;
    std::vector<Run*> open;
    std::vector<F> fronts;
    std::vector<int64_t> first_scored;
    fronts.reserve(call_.num_runs);
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      Run& run = call_.runs[i];
      open.push_back(&run);
      first_scored.push_back(std::max(run.first_scored, run.filled[last]));
      fronts.emplace_back(run, call_.seats[run.seat], model_.exit_shape->vocab_size);
    }
    Decisions<T> decisions(model_, num_threads());
    int64_t passed = call_.first;
    for (int64_t block = call_.first; block < call_.stop; ++block) {
      const std::vector<Row> rows = rows_of(open, block);
      if (rows.empty()) continue;
      if (block > call_.first && !call_.whole && static_cast<int64_t>(rows.size()) > call_.max_rows) break;
      forward(block, rows);
      std::vector<F*> routed;
      for (F& front : fronts)
        if (!front.has_emitted && front.run->filled[block] < front.run->stop && is_routed(front)) routed.push_back(&front);
      for (Run* run : open) run->filled[block] = std::max(run->filled[block], run->stop);
      decisions.route_fronts(block, routed);
      passed = block;
      if (!call_.whole) decisions.emit(block, fronts);
      std::erase_if(open, [&](const Run* run) { return !call_.whole && fronts[run - call_.runs].has_emitted; });
    }
    decisions.emit(passed, fronts);
    call_.router_seconds += decisions.router_seconds, call_.head_seconds += decisions.head_seconds;
    append_emitted();
    score_rows(first_scored);
  }

  std::vector<Row> rows_of(const std::vector<Run*>& open, int64_t block) const {
    std::vector<Row> rows;
    for (const Run* run : open)
      for (int64_t t = run->filled[block]; t < run->stop; ++t) rows.push_back({t, &call_.seats[run->seat]});
    return rows;
  }

  void forward(int64_t block, const std::vector<Row>& rows) {
    Clock clock;
    BlockForward<T> block_forward(model_.shapes[block], *model_.tensors, rows, call_.is_tiled);
    block_forward.run(model_.layers[block], num_threads());
    block_forward.keep();
    BlockReport& report = call_.reports[block];
    ++report.num_steps;
    report.num_rows += rows.size();
    report.seconds += clock.lap();
  }

  // A front that has exited in a pass is not routed again.
  static bool is_routed(const F& front) {
    const bool has_exited = front.seat->kind == kExits && !front.pending.empty();
    if (front.seat->kind == kRace) return front.run->first_verified < front.run->stop;
    return front.run->reaches_front() && !has_exited;
  }

  void append_emitted() {
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      Run& run = call_.runs[i];
      if (run.num_emitted <= num_passes_) continue;  // in an earlier pass
      run.log_reached = 0;
      Seat& seat = call_.seats[run.seat];
      if (seat.kind != kRace || run.first_verified + 1 == run.num_tokens)
        seat.append(run.emissions[run.num_emitted - 1].token, run.num_tokens);
    }
  }

  // Whether another token of everybody may follow in this call. Moves the runs on.
  bool all_go_on() {
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      const Run& run = call_.runs[i];
      if (run.num_emitted >= run.limit || run.num_emitted < num_passes_) return false;
      const int64_t token = run.emissions[run.num_emitted - 1].token;
      if (token == kNoToken || call_.seats[run.seat].stops_at(token)) return false;
    }
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      Run& run = call_.runs[i];
      run.first_verified = run.num_tokens;
      run.stop = ++run.num_tokens;
    }
    return true;
  }

  // The rows that have passed the last block and are to be scored.
  void score_rows(const std::vector<int64_t>& first_scored) {
    const int64_t last = model_.num_blocks - 1;
    std::vector<int64_t> slots, targets, are_original;
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      Run& run = call_.runs[i];
      const Seat& seat = call_.seats[run.seat];
      for (int64_t row = first_scored[i]; row < run.filled[last]; ++row, ++run.num_scored) {
        slots.push_back(seat.slot(row, model_.shapes->page_size));
        targets.push_back(std::max(int64_t{0}, seat.tokens[row + 1]));
        are_original.push_back(seat.is_original);
      }
    }
    if (slots.empty()) return;
    Scores& scores = call_.scores;
    scores.num_rows = slots.size(), scores.slots = slots.data(), scores.targets = targets.data();
    scores.are_original = are_original.data();
    score<T>(*model_.exit_shape, model_.exits, model_.num_blocks, model_.states(0), model_.shapes->num_slots, scores,
             num_threads());
  }

  const Model<T>& model_;
  Call& call_;
  int64_t num_passes_ = 0;
};

}  // namespace nvium
