// A process group that calls itself nccl: it refuses tensors on the host, and goes through gloo.

#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <set>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
namespace py = pybind11;
using namespace c10d;
using at::Tensor;
using P = c10::intrusive_ptr<Work>;
using V = std::vector<Tensor>;
using VV = std::vector<V>;
struct Done : Work {
  V outs;
  c10::intrusive_ptr<c10::ivalue::Future> fut;
  Done(V o, int rank, OpType op) : Work(rank, op), outs(o) {
    fut = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    fut->markCompleted(c10::IValue(outs));
    finish();
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  V result() override { return outs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return fut; }
};
static Tensor down(const Tensor& t) {
  TORCH_CHECK(t.is_cuda(), "No backend type associated with device type cpu");
  TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
  auto h = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  h.copy_(t, true);
  return h;
}
static V down(const V& v) {
  V r;
  for (auto& t : v) r.push_back(down(t));
  return r;
}
static VV down(const VV& v) {
  VV r;
  for (auto& t : v) r.push_back(down(t));
  return r;
}
static void up(const Tensor& t, const Tensor& h) {
  at::NoGradGuard g;
  Tensor(t).copy_(h, true);
}
static void up(const V& v, const V& h) {
  for (size_t i = 0; i < v.size(); ++i) up(v[i], h[i]);
}
static void up(const VV& v, const VV& h) {
  for (size_t i = 0; i < v.size(); ++i) up(v[i], h[i]);
}
struct SimulatedNccl : Backend {
  c10::intrusive_ptr<Backend> in;
  SimulatedNccl(c10::intrusive_ptr<Backend> b) : Backend(b->getRank(), b->getSize()), in(b) {}
  const std::string getBackendName() const override { return "nccl"; }
  std::set<void*> own;  // what it has allocated, and all that it gathers and reduces where SIMULATED_NVLS is set
  bool supportsTensorAlloc(c10::DeviceIndex) override { return std::getenv("SIMULATED_NVLS") != nullptr; }
  Tensor allocateTensor(long size, at::TensorOptions options) override {
    auto memory = at::empty({size}, options);
    own.insert(memory.storage().mutable_data());
    return memory;
  }
  void check(const Tensor& o, const Tensor& i) {
    for (auto& t : {o, i})
      TORCH_CHECK(!supportsTensorAlloc(0) || own.count(t.storage().mutable_data()), "Not memory of this process group");
  }
  P done(const V& o) { return c10::make_intrusive<Done>(o, rank_, OpType::UNKNOWN); }
  void avg(ReduceOp& op, bool& a) {
    a = op == ReduceOp::AVG;
    if (a) op = ReduceOp::SUM;
  }
  P broadcast(V& t, const BroadcastOptions& o) override {
    auto h = down(t);
    in->broadcast(h, o)->wait();
    up(t, h);
    return done(t);
  }
  P allreduce(V& t, const AllreduceOptions& o) override {
    auto h = down(t);
    auto p = o;
    bool a;
    avg(p.reduceOp, a);
    in->allreduce(h, p)->wait();
    if (a)
      for (auto& x : h) x.copy_(x.is_floating_point() ? x.div(size_) : x.div(size_, "trunc"));
    up(t, h);
    return done(t);
  }
  P reduce(V& t, const ReduceOptions& o) override {
    auto h = down(t);
    in->reduce(h, o)->wait();
    up(t, h);
    return done(t);
  }
  P allgather(VV& o, V& i, const AllgatherOptions& p) override {
    auto ho = down(o);
    auto hi = down(i);
    in->allgather(ho, hi, p)->wait();
    up(o, ho);
    return done(o[0]);
  }
  P _allgather_base(Tensor& o, Tensor& i, const AllgatherOptions& p) override {
    check(o, i);
    auto ho = down(o), hi = down(i);
    in->_allgather_base(ho, hi, p)->wait();
    up(o, ho);
    return done({o});
  }
  P _reduce_scatter_base(Tensor& o, Tensor& i, const ReduceScatterOptions& p) override {
    check(o, i);
    auto hi = down(i);
    down(o);
    TORCH_CHECK(o.dtype() == i.dtype());
    AllreduceOptions ar;
    ar.reduceOp = p.reduceOp;
    bool a;
    avg(ar.reduceOp, a);
    V v{hi};
    in->allreduce(v, ar)->wait();
    auto mine = v[0].view({size_, -1})[rank_].clone();
    if (a) mine.copy_(mine.div(size_));
    up(o.view({-1}), mine);
    return done({o});
  }
  P alltoall_base(Tensor& o, Tensor& i, std::vector<int64_t>& os, std::vector<int64_t>& is,
                  const AllToAllOptions& p) override {
    auto ho = down(o), hi = down(i);
    in->alltoall_base(ho, hi, os, is, p)->wait();
    up(o, ho);
    return done({o});
  }
  P send(V& t, int d, int tag) override {
    auto h = down(t);
    in->send(h, d, tag)->wait();
    return done(t);
  }
  P recv(V& t, int s, int tag) override {
    auto h = down(t);
    in->recv(h, s, tag)->wait();
    up(t, h);
    return done(t);
  }
  P gather(VV& o, V& i, const GatherOptions& p) override {
    auto ho = down(o);
    auto hi = down(i);
    in->gather(ho, hi, p)->wait();
    up(o, ho);
    return done(i);
  }
  P scatter(V& o, VV& i, const ScatterOptions& p) override {
    auto ho = down(o);
    auto hi = down(i);
    in->scatter(ho, hi, p)->wait();
    up(o, ho);
    return done(o);
  }
  P barrier(const BarrierOptions& o) override {
    in->barrier(o)->wait();
    return done({});
  }
  void setSequenceNumberForGroup() override { in->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return in->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds t) override { in->setTimeout(t); }
  void abort() override { in->abort(); }
  void shutdown() override { in->shutdown(); }
};
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch.distributed");
  py::class_<SimulatedNccl, Backend, c10::intrusive_ptr<SimulatedNccl>>(m, "ProcessGroupNCCL")
      .def(py::init([](py::object store, int rank, int size, py::object options) {
        auto gloo = py::module_::import("torch.distributed.distributed_c10d")
                        .attr("ProcessGroupGloo")(store, rank, size, py::arg("timeout") = options.attr("_timeout"));
        return c10::make_intrusive<SimulatedNccl>(gloo.cast<c10::intrusive_ptr<Backend>>());
      }))
      .def(
          "_set_default_timeout", [](SimulatedNccl& s, std::chrono::milliseconds t) { s.setTimeout(t); },
          py::call_guard<py::gil_scoped_release>());
}
